"""What do the ranks of one job look like side by side?  Who is late, at what, since when; and who is silent."""
