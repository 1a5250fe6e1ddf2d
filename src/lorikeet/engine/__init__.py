"""One replica: its loop, its process, how it is built, and recording and replay."""
