"""The controller of a cluster, in the API process: dispatcher, replicas, reviews, moves of requests."""
