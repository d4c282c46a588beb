"""Is a record what a run leaves? Each check gives a sentence for what no honest record has. Pure."""
