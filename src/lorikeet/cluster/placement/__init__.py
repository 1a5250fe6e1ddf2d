"""Holds the placement policies, which decide the replicas of each adapter and their shares of its requests."""
