"""One replica: its engine loop, its process, its construction, and recording and replay."""
