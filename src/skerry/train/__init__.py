"""The reference trainer: the same job by Skerry or by plain data-parallel training."""
