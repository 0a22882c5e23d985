"""The engines that train, behind `base.TrainEngine`."""
