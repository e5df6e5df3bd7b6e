// One of Grafana's components for each type of panel.  Grafana keeps two of its panels to itself, `barchart` and
// `state-timeline`: those are drawn in bars.tsx.

import {
  type DataFrame,
  type FieldDisplay,
  type TimeRange,
  FieldColorModeId,
  getDisplayValueAlignmentFactors,
  getFieldDisplayValues,
} from '@grafana/data';
import { BarGaugeDisplayMode, LegendDisplayMode, TooltipDisplayMode, VizOrientation } from '@grafana/schema';
import {
  BarGauge,
  BigValue,
  BigValueColorMode,
  BigValueGraphMode,
  BigValueJustifyMode,
  BigValueTextMode,
  TimeSeries,
  type UPlotConfigBuilder,
  VizRepeater,
  useTheme2,
} from '@grafana/ui';
import { TableNG } from '@grafana/ui/unstable';
import { useLayoutEffect } from 'react';

import { Bars, Timeline } from './bars';
import type { Panel } from './scene';

export interface Moment {
  at: number;
  text: string;
  colour: string;
}

interface Props {
  panel: Panel;
  frames: DataFrame[];
  width: number;
  height: number;
  timeRange: TimeRange;
  moments: Moment[];
}

export function Drawn(props: Props) {
  switch (props.panel.type) {
    case 'timeseries':
      return <Lines {...props} />;
    case 'stat':
      return <Stat {...props} />;
    case 'bargauge':
      return <Gauges {...props} />;
    case 'table':
      return <Rows {...props} />;
    case 'barchart':
      return <Bars {...props} />;
    case 'state-timeline':
      return <Timeline {...props} />;
    case 'text':
      return <div style={{ padding: 4 }}>{props.panel.options.content}</div>;
    default:
      throw new Error(`nothing is known of panels of the type ${props.panel.type}`);
  }
}

function Lines({ panel, frames, width, height, timeRange, moments }: Props) {
  const legend = {
    displayMode: LegendDisplayMode.List,
    placement: 'bottom' as const,
    showLegend: true,
    calcs: [],
    ...panel.options.legend,
  };
  return (
    <TimeSeries
      frames={frames}
      width={width}
      height={height}
      timeRange={timeRange}
      timeZone="utc"
      legend={legend}
      options={{ tooltip: { mode: TooltipDisplayMode.None } }}
    >
      {(builder) => <Marks builder={builder} moments={moments} />}
    </TimeSeries>
  );
}

function Marks({ builder, moments }: { builder: UPlotConfigBuilder; moments: Moment[] }) {
  const theme = useTheme2();
  useLayoutEffect(() => {
    builder.addHook('draw', (plot) => {
      const { ctx, bbox } = plot;
      for (const moment of moments) {
        const x = plot.valToPos(moment.at, 'x', true);
        ctx.save();
        ctx.strokeStyle = ctx.fillStyle = theme.visualization.getColorByName(moment.colour);
        ctx.lineWidth = 2 * devicePixelRatio;
        ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
        ctx.beginPath();
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, bbox.top + bbox.height);
        ctx.stroke();
        ctx.beginPath();
        ctx.moveTo(x - 5 * devicePixelRatio, bbox.top + bbox.height + 6 * devicePixelRatio);
        ctx.lineTo(x + 5 * devicePixelRatio, bbox.top + bbox.height + 6 * devicePixelRatio);
        ctx.lineTo(x, bbox.top + bbox.height);
        ctx.fill();
        ctx.restore();
      }
    });
  }, [builder, moments, theme]);
  return null;
}

function valuesOf({ panel, frames, width }: Props, theme: ReturnType<typeof useTheme2>, sparkline: boolean): FieldDisplay[] {
  return getFieldDisplayValues({
    fieldConfig: panel.fieldConfig,
    reduceOptions: { calcs: ['lastNotNull'], values: false, ...panel.options.reduceOptions },
    replaceVariables: (text) => text,
    theme,
    data: frames,
    sparkline,
    timeZone: 'utc',
    percentChange: false,
  } as Parameters<typeof getFieldDisplayValues>[0]).filter(() => width > 0);
}

function Stat(props: Props) {
  const theme = useTheme2();
  const { panel, width, height } = props;
  const options = panel.options;
  const values = valuesOf(props, theme, options.graphMode !== BigValueGraphMode.None);
  return (
    <VizRepeater<FieldDisplay, ReturnType<typeof getDisplayValueAlignmentFactors>>
      getValues={() => values}
      getAlignmentFactors={(all) => getDisplayValueAlignmentFactors(all)}
      orientation={options.orientation === 'auto' ? VizOrientation.Auto : options.orientation}
      width={width}
      height={height}
      itemSpacing={3}
      renderCounter={0}
      autoGrid
      source={props.frames}
      renderValue={({ value, alignmentFactors, width: w, height: h, count }) => (
        <BigValue
          theme={theme}
          value={value.display}
          count={count}
          sparkline={value.sparkline}
          colorMode={options.colorMode ?? BigValueColorMode.Value}
          graphMode={options.graphMode ?? BigValueGraphMode.Area}
          justifyMode={options.justifyMode ?? BigValueJustifyMode.Auto}
          textMode={textModeOf(options.textMode, values.length)}
          alignmentFactors={alignmentFactors}
          text={options.text}
          width={w}
          height={h}
        />
      )}
    />
  );
}

// As Grafana's stat panel does: "auto" shows names where there are several values.
function textModeOf(mode: BigValueTextMode | undefined, count: number): BigValueTextMode {
  if (mode && mode !== BigValueTextMode.Auto) {
    return mode;
  }
  return count > 1 ? BigValueTextMode.ValueAndName : BigValueTextMode.Value;
}

function Gauges(props: Props) {
  const theme = useTheme2();
  const { panel, width, height } = props;
  const options = panel.options;
  const values = valuesOf(props, theme, false);
  return (
    <VizRepeater<FieldDisplay, ReturnType<typeof getDisplayValueAlignmentFactors>>
      getValues={() => values}
      getAlignmentFactors={(all) => getDisplayValueAlignmentFactors(all)}
      orientation={options.orientation ?? VizOrientation.Horizontal}
      width={width}
      height={height}
      itemSpacing={8}
      minVizHeight={16}
      renderCounter={0}
      source={props.frames}
      renderValue={({ value, alignmentFactors, width: w, height: h, orientation }) => (
        <BarGauge
          theme={theme}
          value={value.display}
          field={value.field}
          display={value.view?.getFieldDisplayProcessor(value.colIndex ?? 0)}
          width={w}
          height={h}
          orientation={orientation}
          alignmentFactors={alignmentFactors}
          displayMode={options.displayMode ?? BarGaugeDisplayMode.Gradient}
          showUnfilled={options.showUnfilled ?? true}
          lcdCellWidth={12}
          itemSpacing={8}
        />
      )}
    />
  );
}

function Rows({ panel, frames, width, height, timeRange }: Props) {
  if (frames.length === 0) {
    return null;
  }
  return (
    <TableNG
      data={frames[0]}
      width={width}
      height={height}
      timeRange={timeRange}
      sortBy={panel.options.sortBy}
      noHeader={panel.options.showHeader === false}
      cellHeight={panel.options.cellHeight}
      fieldConfig={panel.fieldConfig}
      noValue={panel.fieldConfig.defaults.noValue}
      enableVirtualization={false}
      resizable
    />
  );
}

export const DEFAULT_COLOUR = { mode: FieldColorModeId.PaletteClassic };
