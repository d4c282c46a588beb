"""Records as rows per repeat and per cell, and as the Study that report, compare and share read."""
