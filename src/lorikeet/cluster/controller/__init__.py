"""The API process's side of a cluster: dispatcher, replicas, placement reviews, moves of requests."""
