"""What the sources share: chance that is the same on every machine, ranks, epochs."""
