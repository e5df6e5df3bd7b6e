"""One file per source; each turns a reading into samples."""
