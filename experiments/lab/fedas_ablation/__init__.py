"""Ablation of FedAS's lead over FedPer: one choice at a time, from FedPer to the released procedure."""
