"""Three hospitals that train one model, with a guarantee for every patient."""
