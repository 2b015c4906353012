"""Alignment of prototypes or features with fixed anchors: anchors, weights, schedules, guards."""
