"""Read one sample from a JSON object in the forms of common datasets, the same in packing and
training."""
