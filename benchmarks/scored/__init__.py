"""Rows R1 to R8 and S1 to S4 of the reliability targets, each as a function that measures one running server."""
