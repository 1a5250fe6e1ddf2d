"""The loop of one replica, its executors, and the channel to the API process."""
