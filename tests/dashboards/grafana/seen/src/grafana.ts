// What Grafana's application sets up before a panel is drawn, and its packages leave to it.

import {
  type DataFrame,
  type DataTransformerConfig,
  type FieldConfigPropertyItem,
  type FieldConfigSource,
  FieldColorModeId,
  FieldConfigOptionsRegistry,
  type GrafanaTheme2,
  type TransformerRegistryItem,
  applyFieldOverrides,
  cacheFieldDisplayNames,
  setTimeZoneResolver,
  standardTransformers,
  standardTransformersRegistry,
  transformDataFrame,
} from '@grafana/data';
import { firstValueFrom } from 'rxjs';

export function setUp(): void {
  setTimeZoneResolver(() => 'utc');
  const all = new Map(Object.values(standardTransformers).map((one) => [one.id, one])); // some stand there twice
  standardTransformersRegistry.setInit(() =>
    [...all.values()].map(
      (transformation) =>
        ({ id: transformation.id, name: transformation.name, transformation: () => Promise.resolve(transformation) }) as unknown as TransformerRegistryItem
    )
  );
}

// A registry that knows each property that is overridden: Grafana asks it how to write the value into a field.
function registryOf(config: FieldConfigSource): FieldConfigOptionsRegistry {
  const ids = new Set(config.overrides.flatMap((override) => override.properties.map((property) => property.id)));
  for (const id of Object.keys(config.defaults)) {
    if (id !== 'custom') {
      ids.add(id);
    }
  }
  for (const id of Object.keys(config.defaults.custom ?? {})) {
    ids.add(`custom.${id}`);
  }
  const items = [...ids].map((id) => {
    const isCustom = id.startsWith('custom.');
    return {
      id,
      path: isCustom ? id.slice('custom.'.length) : id,
      name: id,
      isCustom,
      process: (value: unknown) => value,
      shouldApply: () => true,
      hideFromDefaults: false,
    } as unknown as FieldConfigPropertyItem;
  });
  return new FieldConfigOptionsRegistry(() => items);
}

export async function prepared(
  frames: DataFrame[],
  transformations: DataTransformerConfig[],
  config: FieldConfigSource,
  type: string,
  theme: GrafanaTheme2
): Promise<DataFrame[]> {
  const completed = complete(config, type);
  const transformed = await firstValueFrom(transformDataFrame(transformations, frames));
  const done = applyFieldOverrides({
    data: transformed,
    fieldConfig: completed,
    fieldConfigRegistry: registryOf(completed),
    replaceVariables: (text) => text,
    theme,
    timeZone: 'utc',
  });
  cacheFieldDisplayNames(done);
  return done;
}

// What Grafana adds to a dashboard that it loads: the panels' default colours, and minus infinity, which JSON cannot say.
function complete(config: FieldConfigSource, type: string): FieldConfigSource {
  const copy = structuredClone(config);
  const isSeries = type === 'timeseries' || type === 'barchart';
  copy.defaults.color ??= { mode: isSeries ? FieldColorModeId.PaletteClassic : FieldColorModeId.Thresholds };
  for (const step of copy.defaults.thresholds?.steps ?? []) {
    step.value = step.value === null ? -Infinity : step.value;
  }
  return copy;
}
