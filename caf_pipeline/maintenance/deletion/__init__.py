"""Which objects may be deleted at their source, by what is known now of each of them. It deletes nothing."""
