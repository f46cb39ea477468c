"""What the DataLoader is made of: tagged items, what is done of an epoch, and how to go on from there."""
