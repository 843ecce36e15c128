"""What training costs on this machine: a step, and the memory and disk it takes."""
