"""The engines that sample, behind `base.RolloutEngine`."""
