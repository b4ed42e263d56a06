"""The reference trainer: one job, trained by Skerry or by plain data-parallel training."""
