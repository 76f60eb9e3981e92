"""One file per table or figure of the paper; all results in one tidy form (`nestedmaml.experiments.results`)."""
