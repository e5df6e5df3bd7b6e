// What may a dashboard of ours hold?  Grafana's own types (@grafana/schema), made strict where they end.
//
// Grafana's `Panel` leaves `options`, `fieldConfig.defaults.custom`, `overrides` and `targets` open, because each panel
// plugin and data source has its own.  Those of the panels and of the data source that we use are filled in here, so that
// a misspelt option is an error: in a literal TypeScript refuses properties that a type does not have.
//
// Left out: presence.  What an option's default is, Grafana knows when it loads the panel, so all options are optional.

import type {
  Dashboard,
  FieldConfig,
  Panel,
  RowPanel,
  AnnotationQuery,
} from '@grafana/schema';
import type * as barchart from '@grafana/schema/dist/esm/raw/composable/barchart/panelcfg/x/BarChartPanelCfg_types.gen';
import type * as bargauge from '@grafana/schema/dist/esm/raw/composable/bargauge/panelcfg/x/BarGaugePanelCfg_types.gen';
import type * as stat from '@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen';
import type * as timeline from '@grafana/schema/dist/esm/raw/composable/statetimeline/panelcfg/x/StateTimelinePanelCfg_types.gen';
import type * as table from '@grafana/schema/dist/esm/raw/composable/table/panelcfg/x/TablePanelCfg_types.gen';
import type * as text from '@grafana/schema/dist/esm/raw/composable/text/panelcfg/x/TextPanelCfg_types.gen';
import type * as timeseries from '@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen';

// JSON has no enums: 'table' stands for LegendDisplayMode.Table.
type Json<T> = T extends string
  ? `${T}`
  : T extends number | boolean | null | undefined
    ? T
    : T extends Array<infer U>
      ? Array<Json<U>>
      : T extends object
        ? { [K in keyof T]: Json<T[K]> }
        : T;

type Optional<T> = T extends Array<infer U>
  ? Array<Optional<U>>
  : T extends object
    ? { [K in keyof T]?: Optional<T[K]> }
    : T;

// @grafana/schema's interface has an index signature only for plugins that are not known.
type Known<T> = { [K in keyof T as string extends K ? never : K]: T[K] };

type Properties<Custom> =
  | { [K in keyof Field]-?: { id: K; value: Json<Field[K]> } }[keyof Field]
  | { [K in keyof Custom & string]-?: { id: `custom.${K}`; value: Optional<Json<Custom[K]>> } }[keyof Custom & string];
type Field = Omit<Known<FieldConfig>, 'custom'>;

type Matcher =
  | { id: 'byName'; options: string }
  | { id: 'byRegexp'; options: string }
  | { id: 'byType'; options: 'number' | 'string' | 'time' | 'boolean' }
  | { id: 'byFrameRefID'; options: string };

// What Grafana's Prometheus data source reads of a target (its PrometheusQuery), and only that.
type Target = {
  refId: string;
  expr: string;
  datasource: { type: 'prometheus'; uid: '${datasource}' };
  format: 'time_series' | 'table' | 'heatmap';
  hide?: boolean;
  instant?: boolean;
  range?: boolean;
  interval?: string;
  legendFormat?: string;
};

type Is<Type extends string, Options, Custom> = Omit<
  Json<Known<Panel>>,
  'type' | 'options' | 'fieldConfig' | 'targets'
> & {
  type: Type;
  title: string;
  description: string;
  options: Optional<Json<Options>>;
  targets: Target[];
  fieldConfig: {
    defaults: Json<Field> & { custom?: Optional<Json<Custom>> };
    overrides: Array<{ matcher: Matcher; properties: Array<Properties<Custom>> }>;
  };
};

type Text = Omit<Json<Known<Panel>>, 'type' | 'options'> & { type: 'text'; options: Optional<Json<text.Options>> };

export type PacecarPanel =
  | Is<'timeseries', timeseries.Options, timeseries.FieldConfig>
  | Is<'barchart', barchart.Options, barchart.FieldConfig>
  | Is<'bargauge', bargauge.Options, Record<never, never>>
  | Is<'stat', stat.Options, Record<never, never>>
  | Is<'table', table.Options, table.FieldConfig>
  | Is<'state-timeline', timeline.Options, timeline.FieldConfig>
  | Text;

type Row = Omit<Json<RowPanel>, 'panels'> & { panels?: PacecarPanel[] };

// Not in the schema, but read by Grafana: queries of Prometheus stand beside an annotation's own fields.
type Mark = Omit<Json<AnnotationQuery>, 'target'> & { expr: string; titleFormat?: string; tagKeys?: string; textFormat?: string };

export type PacecarDashboard = Omit<Json<Dashboard>, 'panels' | 'annotations'> & {
  title: string;
  uid: string;
  panels: Array<PacecarPanel | Row>;
  annotations: { list: Mark[] };
};

