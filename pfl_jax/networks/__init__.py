"""Networks, and their convolution and pooling operations."""
