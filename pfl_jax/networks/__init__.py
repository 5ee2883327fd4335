"""Networks, with their convolution and pooling."""
