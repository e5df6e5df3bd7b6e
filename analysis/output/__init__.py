"""Shows a document of the analysis: on a terminal, as a page or picture, as a trace for a viewer, as CSV files."""
