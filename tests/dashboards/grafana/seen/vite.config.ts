import { defineConfig } from 'vite';

export default defineConfig({
  // Grafana's packages ask for these as their own build sets them.
  define: { 'process.env.NODE_ENV': '"production"', 'process.env': '{}', global: 'globalThis' },
  build: { chunkSizeWarningLimit: 20_000, sourcemap: false, reportCompressedSize: false },
});
