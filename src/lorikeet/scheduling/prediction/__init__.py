"""Predicts output lengths, by the recent answers of an adapter or by a learned model."""
