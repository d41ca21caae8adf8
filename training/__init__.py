"""What every recipe shares, and a recipe of yours: from options to a finished run."""
