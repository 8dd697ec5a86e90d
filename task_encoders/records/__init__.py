"""One JSON object to one sample, in all forms that datasets have it: packing and training read the
same sample in it."""
