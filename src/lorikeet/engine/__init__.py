"""One replica: its loop, how it is built, its process, and recording and replay."""
