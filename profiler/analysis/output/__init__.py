"""Shows a document of the analysis: on a terminal, as an SVG picture, as a trace for a viewer, as CSV files."""
