"""What does this machine say about itself?  One file per source; each turns a reading into samples."""
