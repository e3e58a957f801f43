"""Images of running sequences: their features, and the columns of a pass in which they stand (`encoder`)."""
