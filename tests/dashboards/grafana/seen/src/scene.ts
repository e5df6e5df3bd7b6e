// What is to be drawn: written by tests/dashboards/seen.py, variables filled in.

import type { FieldConfigSource, DataTransformerConfig } from '@grafana/data';

export interface Target {
  refId: string;
  expr: string;
  format: 'time_series' | 'table';
  instant?: boolean;
  legendFormat?: string;
}

export interface Panel {
  id: number;
  type: string;
  title: string;
  description?: string;
  gridPos: { x: number; y: number; w: number; h: number };
  targets?: Target[];
  transformations?: DataTransformerConfig[];
  fieldConfig: FieldConfigSource;
  options: Record<string, any>;
  collapsed?: boolean;
}

export interface Mark {
  name: string;
  expr: string;
  iconColor: string;
  titleFormat?: string;
}

export interface Scene {
  title: string;
  description: string;
  panels: Panel[];
  annotations: Mark[];
  variables: Array<{ label: string; text: string }>;
  links: string[];
  prometheus: string;
  from: number;
  to: number;
  step: number;
  theme: 'light' | 'dark';
}
