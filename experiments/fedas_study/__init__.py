"""What FedAS's lead over FedPer is made of: one choice at a time, from FedPer to the released procedure."""
