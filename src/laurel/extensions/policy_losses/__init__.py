"""Policy losses of the field beside PPO's, each in a few lines: GMPO, SAPO, DPPO."""
