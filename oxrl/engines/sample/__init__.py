"""What samples: engines behind `base.RolloutEngine`."""
