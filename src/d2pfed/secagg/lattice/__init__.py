"""One message per client: vectors behind learning with errors, opened by a committee."""
