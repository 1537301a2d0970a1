"""Two-phase commit at the coordinator: census, standing registrations, epochs, votes, decisions and their memory."""
