create table accounts (id int primary key, balance bigint not null);
create table transfers (id text primary key, source int not null, target int not null, amount bigint not null);
