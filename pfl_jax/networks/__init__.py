"""Networks, and the convolution and pooling that they are made of."""
