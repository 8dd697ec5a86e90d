"""What Energon reads of a pack."""

from task_encoders.energon_samples import part_filter, sample_loader

__all__ = ["part_filter", "sample_loader"]
