"""An app that knows nothing of d2pfed."""
