// Grafana's bar chart and state timeline are not in its packages.  These follow their options where ours use them, with
// Grafana's fields, colours, units, fonts and legend; the bars themselves are SVG.

import {
  type DataFrame,
  type Field,
  FieldType,
  type TimeRange,
  formattedValueToString,
  getDisplayProcessor,
  getFieldDisplayName,
  getFieldSeriesColor,
} from '@grafana/data';
import { LegendDisplayMode } from '@grafana/schema';
import { VizLegend, useTheme2 } from '@grafana/ui';

import type { Panel } from './scene';

interface Props {
  panel: Panel;
  frames: DataFrame[];
  width: number;
  height: number;
  timeRange: TimeRange;
}

const LEGEND = 26;

export function Bars({ panel, frames, width, height }: Props) {
  const theme = useTheme2();
  const frame = frames[0];
  if (!frame) {
    return null;
  }
  const names = frame.fields.find((field) => getFieldDisplayName(field, frame) === panel.options.xField) ?? frame.fields[0];
  const parts = frame.fields.filter((field) => field !== names && field.type === FieldType.number);
  const isLying = panel.options.orientation === 'horizontal';
  const rows = names.values.map((name, row) => ({
    name: names.display ? formattedValueToString(names.display(name)) : String(name),
    values: parts.map((field) => Number(field.values[row] ?? 0)),
  }));
  const legend = panel.options.legend?.showLegend === false || parts.length < 2 ? 0 : LEGEND * Math.ceil(parts.length / 4);
  const top = parts[0]?.config.max ?? Math.max(...rows.map((row) => row.values.reduce((sum, value) => sum + value, 0)));
  const write = (field: Field, value: number) => {
    return formattedValueToString((field.display ?? getDisplayProcessor({ field, theme }))(value));
  };
  const left = isLying ? 10 + Math.max(...rows.map((row) => row.name.length)) * 6.6 : 46;
  const bottom = 22;
  const inner = { width: width - left - 12, height: height - legend - bottom - 6 };
  const slot = (isLying ? inner.height : inner.width) / rows.length;
  const thick = slot * 0.7;
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((share) => share * top);
  const axis = { fill: theme.colors.text.primary, fontSize: 12, fontFamily: theme.typography.fontFamily };
  return (
    <div style={{ width, height }}>
      <svg width={width} height={height - legend}>
        {ticks.map((tick) => {
          const at = (tick / top) * (isLying ? inner.width : inner.height);
          return isLying ? (
            <g key={tick}>
              <line x1={left + at} x2={left + at} y1={6} y2={6 + inner.height} stroke={theme.colors.border.weak} />
              <text x={left + at} y={inner.height + 20} textAnchor="middle" {...axis}>
                {write(parts[0], tick)}
              </text>
            </g>
          ) : (
            <g key={tick}>
              <line x1={left} x2={width - 12} y1={6 + inner.height - at} y2={6 + inner.height - at} stroke={theme.colors.border.weak} />
              <text x={left - 6} y={10 + inner.height - at} textAnchor="end" {...axis}>
                {write(parts[0], tick)}
              </text>
            </g>
          );
        })}
        {rows.map((row, number) => {
          let sum = 0;
          const from = number * slot + (slot - thick) / 2;
          return (
            <g key={row.name}>
              {row.values.map((value, part) => {
                const long = (value / top) * (isLying ? inner.width : inner.height);
                const begin = (sum / top) * (isLying ? inner.width : inner.height);
                sum += value;
                const { color } = getFieldSeriesColor(parts[part], theme);
                return isLying ? (
                  <rect key={part} x={left + begin} y={6 + from} width={Math.max(0, long)} height={thick} fill={color} />
                ) : (
                  <rect key={part} x={left + from} y={6 + inner.height - begin - long} width={thick} height={Math.max(0, long)} fill={color} />
                );
              })}
              {isLying ? (
                <text x={left - 6} y={10 + from + thick / 2} textAnchor="end" {...axis}>
                  {row.name}
                </text>
              ) : (
                <text x={left + from + thick / 2} y={inner.height + 20} textAnchor="middle" {...axis}>
                  {row.name}
                </text>
              )}
            </g>
          );
        })}
      </svg>
      {legend > 0 && (
        <VizLegend
          placement="bottom"
          displayMode={LegendDisplayMode.List}
          items={parts.map((field) => ({
            label: getFieldDisplayName(field, frame),
            color: getFieldSeriesColor(field, theme).color,
            yAxis: 1,
          }))}
        />
      )}
    </div>
  );
}

// One row a series, a bar where it has a value.
export function Timeline({ panel, frames, width, height, timeRange }: Props) {
  const theme = useTheme2();
  const rows = frames.flatMap((frame) => {
    const time = frame.fields.find((field) => field.type === FieldType.time);
    return frame.fields
      .filter((field) => field !== time)
      .map((field) => ({ field, times: time!.values as number[], name: getFieldDisplayName(field, frame, frames) }));
  });
  const left = 12 + Math.max(0, ...rows.map((row) => row.name.length)) * 6.8;
  const inner = { width: width - left - 12, height: height - 26 };
  const from = timeRange.from.valueOf();
  const long = timeRange.to.valueOf() - from;
  const slot = inner.height / Math.max(1, rows.length);
  const x = (at: number) => left + ((at - from) / long) * inner.width;
  const axis = { fill: theme.colors.text.primary, fontSize: 12, fontFamily: theme.typography.fontFamily };
  const opacity = (panel.fieldConfig.defaults.custom?.fillOpacity ?? 70) / 100;
  return (
    <svg width={width} height={height}>
      {[0, 0.25, 0.5, 0.75].map((share) => (
        <text key={share} x={left + share * inner.width} y={height - 6} {...axis}>
          {new Date(from + share * long).toISOString().slice(11, 19)}
        </text>
      ))}
      {rows.map((row, number) => {
        const step = row.times.length > 1 ? row.times[1] - row.times[0] : 0;
        return (
          <g key={row.name}>
            <text x={left - 6} y={4 + number * slot + slot / 2} textAnchor="end" {...axis}>
              {row.name}
            </text>
            {row.times.map((at, index) =>
              row.field.values[index] == null ? null : (
                <rect
                  key={at}
                  x={x(at)}
                  y={number * slot + slot * 0.05}
                  width={Math.max(0, Math.min(x(at + step), width - 12) - x(at)) + 0.3}
                  height={slot * 0.9}
                  fill={getFieldSeriesColor(row.field, theme).color}
                  fillOpacity={opacity}
                />
              )
            )}
          </g>
        );
      })}
    </svg>
  );
}
