"""Devices that torch computes on, whose steps are padded to fixed shapes and compiled or captured before they serve."""
