// Draws one dashboard from live data, on Grafana's grid.  It is not a Grafana server: nothing can be edited, and what
// Grafana's application does around its panels (menus, tooltips, links) is left out.

import { type DataFrame, ThemeContext, createTheme, dateTime, FieldType } from '@grafana/data';
import { GlobalStyles, PanelChrome, PortalContainer } from '@grafana/ui';
import { useEffect, useState } from 'react';
import { createRoot } from 'react-dom/client';

import { framesOf, momentsOf } from './frames';
import { prepared, setUp } from './grafana';
import { Drawn, type Moment } from './panels';
import type { Panel, Scene } from './scene';

const COLUMNS = 24;
const CELL = 30; // GRID_CELL_HEIGHT of Grafana
const GAP = 8; // GRID_CELL_VMARGIN of Grafana
const HEAD = 92;

setUp();

let open = 0;
const settle = (count: number) => {
  open += count;
  document.body.dataset.open = `${open}`;
};

function useWidth(): number {
  const [width, setWidth] = useState(window.innerWidth);
  useEffect(() => {
    const follow = () => setWidth(window.innerWidth);
    window.addEventListener('resize', follow);
    return () => window.removeEventListener('resize', follow);
  }, []);
  return width;
}

function Shown({ panel, scene, moments }: { panel: Panel; scene: Scene; moments: Moment[] }) {
  const theme = createTheme({ colors: { mode: scene.theme } });
  const [frames, setFrames] = useState<DataFrame[] | null>(null);
  const [error, setError] = useState<string>();
  useEffect(() => {
    if (panel.type === 'row') {
      return;
    }
    settle(1);
    framesOf(scene, panel.targets ?? [])
      .then((raw) => prepared(raw, panel.transformations ?? [], panel.fieldConfig, panel.type, theme))
      .then(setFrames)
      .catch((reason) => {
        setError(`${reason}`);
        console.error(`${panel.title}: ${reason}`);
      })
      .finally(() => requestAnimationFrame(() => settle(-1)));
  }, []);
  const column = (useWidth() - 2 * GAP + GAP) / COLUMNS;
  const { x, y, w, h } = panel.gridPos;
  const place = {
    position: 'absolute' as const,
    left: GAP + x * column,
    top: HEAD + y * (CELL + GAP),
  };
  const width = w * column - GAP;
  const height = h * (CELL + GAP) - GAP;
  if (panel.type === 'row') {
    return (
      <div style={{ ...place, width, height, ...theme.typography.h6, lineHeight: `${height}px` }}>
        {panel.collapsed ? '› ' : '⌄ '}
        {panel.title}
      </div>
    );
  }
  const range = { from: dateTime(scene.from * 1000), to: dateTime(scene.to * 1000) };
  const timeRange = { ...range, raw: range };
  const isEmpty = frames !== null && !frames.some((frame) => frame.fields.some((field) => field.type !== FieldType.time && field.values.length));
  return (
    <div style={{ ...place, width, height }} data-panel={panel.title} data-empty={isEmpty}>
      <PanelChrome
        title={panel.title}
        description={panel.description}
        width={width}
        height={height}
        padding={panel.type === 'table' ? 'none' : 'md'}
        statusMessage={error}
      >
        {(innerWidth, innerHeight) =>
          isEmpty ? (
            <div style={{ display: 'flex', height: innerHeight, alignItems: 'center', justifyContent: 'center', textAlign: 'center' }}>
              {panel.fieldConfig.defaults.noValue ?? 'No data'}
            </div>
          ) : (
            frames && (
              <Drawn panel={panel} frames={frames} width={innerWidth} height={innerHeight} timeRange={timeRange} moments={moments} />
            )
          )
        }
      </PanelChrome>
    </div>
  );
}

function Page({ scene }: { scene: Scene }) {
  const [moments, setMoments] = useState<Moment[] | null>(null);
  useEffect(() => {
    Promise.all(
      scene.annotations.map(async (mark) =>
        (await momentsOf(scene, mark)).map((moment) => ({ ...moment, colour: mark.iconColor }))
      )
    ).then((found) => setMoments(found.flat()));
  }, []);
  const bottom = Math.max(...scene.panels.map((panel) => panel.gridPos.y + panel.gridPos.h));
  const theme = createTheme({ colors: { mode: scene.theme } });
  return (
    <div style={{ position: 'relative', height: HEAD + bottom * (CELL + GAP) + GAP }}>
      <div style={{ padding: '12px 16px 4px', display: 'flex', gap: 16, alignItems: 'baseline' }}>
        <span style={{ ...theme.typography.h4 }}>{scene.title}</span>
        <span style={{ color: theme.colors.text.secondary }}>{scene.description}</span>
      </div>
      <div style={{ padding: '4px 16px', display: 'flex', gap: 8 }}>
        {scene.variables.map(({ label, text }) => (
          <span key={label} style={{ border: `1px solid ${theme.colors.border.medium}`, borderRadius: 2, padding: '3px 8px' }}>
            <b style={{ fontWeight: 500 }}>{label}</b>&ensp;{text}
          </span>
        ))}
        <span style={{ marginLeft: 'auto', display: 'flex', gap: 8 }}>
          {scene.links.map((link) => (
            <span key={link} style={{ color: theme.colors.text.link, padding: '3px 4px' }}>
              {link}
            </span>
          ))}
        </span>
      </div>
      {moments !== null &&
        scene.panels.map((panel) => <Shown key={panel.id} panel={panel} scene={scene} moments={moments} />)}
    </div>
  );
}

const scene: Scene = await (await fetch('/scene.json')).json();
const theme = createTheme({ colors: { mode: scene.theme } });
createRoot(document.getElementById('root')!).render(
  <ThemeContext.Provider value={theme}>
    <GlobalStyles />
    <PortalContainer />
    <Page scene={scene} />
  </ThemeContext.Provider>
);
