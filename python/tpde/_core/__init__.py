"""What all other modules use: errors, checks of arguments, names, progress, temporary folders."""
