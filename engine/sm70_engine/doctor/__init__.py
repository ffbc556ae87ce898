"""`sm70-doctor`: what is wrong with a machine or a pod, on one screen."""
