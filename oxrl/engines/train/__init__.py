"""What trains: engines behind `base.TrainEngine`."""
