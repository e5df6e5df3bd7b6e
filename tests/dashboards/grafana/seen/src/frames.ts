// From Prometheus' answers to Grafana's data frames, as its Prometheus data source makes them: one frame a series with
// gaps as nulls, or one frame a target for tables.

import { type DataFrame, FieldType, type Labels, toDataFrame } from '@grafana/data';

import type { Mark, Scene, Target } from './scene';

interface Series {
  metric: Labels;
  values?: Array<[number, string]>;
  value?: [number, string];
}

async function ask(scene: Scene, what: string, parameters: Record<string, string>): Promise<Series[]> {
  const answer = await fetch(`${scene.prometheus}/api/v1/${what}?${new URLSearchParams(parameters)}`);
  const said = await answer.json();
  if (said.status !== 'success') {
    throw new Error(`${said.error}: ${parameters.query}`);
  }
  return said.data.result;
}

const range = (scene: Scene, expr: string) =>
  ask(scene, 'query_range', { query: expr, start: `${scene.from}`, end: `${scene.to}`, step: `${scene.step}` });

export async function framesOf(scene: Scene, targets: Target[]): Promise<DataFrame[]> {
  const answers = await Promise.all(
    targets.map(async (target) => {
      const series = target.instant
        ? await ask(scene, 'query', { query: target.expr, time: `${scene.to}` })
        : await range(scene, target.expr);
      return target.format === 'table'
        ? tableOf(target, series, targets.length > 1)
        : series.map((one) => seriesOf(scene, target, one));
    })
  );
  return answers.flat();
}

function seriesOf(scene: Scene, target: Target, one: Series): DataFrame {
  const points = new Map((one.values ?? [one.value!]).map(([at, value]) => [Math.round(at), Number(value)]));
  const times: number[] = [];
  if (one.values) {
    for (let at = scene.from; at <= scene.to; at += scene.step) {
      times.push(at);
    }
  } else {
    times.push(Math.round(one.value![0]));
  }
  const name = legendOf(target, one.metric);
  return toDataFrame({
    refId: target.refId,
    name,
    fields: [
      { name: 'Time', type: FieldType.time, values: times.map((at) => at * 1000) },
      {
        name: 'Value',
        type: FieldType.number,
        labels: one.metric,
        config: { displayNameFromDS: name },
        values: times.map((at) => points.get(at) ?? null),
      },
    ],
  });
}

function tableOf(target: Target, series: Series[], isOneOfMany: boolean): DataFrame[] {
  if (series.length === 0) {
    return [];
  }
  const labels = [...new Set(series.flatMap((one) => Object.keys(one.metric)))].sort();
  return [
    toDataFrame({
      refId: target.refId,
      fields: [
        { name: 'Time', type: FieldType.time, values: series.map((one) => one.value![0] * 1000) },
        ...labels.map((label) => ({
          name: label,
          type: FieldType.string,
          config: { filterable: true },
          values: series.map((one) => one.metric[label] ?? ''),
        })),
        {
          name: isOneOfMany ? `Value #${target.refId}` : 'Value',
          type: FieldType.number,
          values: series.map((one) => Number(one.value![1])),
        },
      ],
    }),
  ];
}

function legendOf(target: Target, labels: Labels): string {
  const format = target.legendFormat;
  if (!format || format === '__auto') {
    const pairs = Object.entries(labels).filter(([name]) => name !== '__name__');
    return `${labels.__name__ ?? ''}{${pairs.map(([name, value]) => `${name}="${value}"`).join(', ')}}`;
  }
  return format.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, name) => labels[name] ?? '');
}

// When an annotation's expression is there, after it was not.
export async function momentsOf(scene: Scene, mark: Mark): Promise<Array<{ at: number; text: string }>> {
  const moments: Array<{ at: number; text: string }> = [];
  for (const one of await range(scene, mark.expr)) {
    let last = -Infinity;
    const text = (mark.titleFormat ?? mark.name).replace(/\{\{(\w+)\}\}/g, (_, name) => one.metric[name] ?? '');
    for (const [at] of one.values ?? []) {
      if (at - last > scene.step * 1.5) {
        moments.push({ at: at * 1000, text });
      }
      last = at;
    }
  }
  return moments;
}
