-- The warehouse of taskq demo-orders: what its bodies write in the transaction that ends their job, and what the play sets up
-- and reads. Its tables stand in a schema of their own beside taskq's, and are gone when the play is over.

-- name: clear
-- Take away what a play has left. No cascade: what else somebody has put there stays.
drop table if exists taskq_demo_orders.moves, taskq_demo_orders.stock;
drop schema if exists taskq_demo_orders;

-- name: build
-- In stock are what the books say is free to be reserved, and what is really on the shelf.
create schema taskq_demo_orders;
create table taskq_demo_orders.stock (item text primary key, books integer not null, shelf integer not null);
create table taskq_demo_orders.moves (number integer not null, what text not null, item text not null);

-- name: fill
-- Put an item into stock.
insert into taskq_demo_orders.stock (item, books, shelf) values ($1::text, $2::int, $3::int);

-- name: reserve
-- Reserve one for an order; no row where the books have none left.
with taken as (
  update taskq_demo_orders.stock s set books = s.books - 1 where s.item = $2::text and s.books > 0 returning s.item)
insert into taskq_demo_orders.moves (number, what, item) select $1::int, 'reserved', t.item from taken t returning item;

-- name: release
-- Give back what was reserved for an order.
with given as (
  update taskq_demo_orders.stock s set books = s.books + 1 where s.item = $2::text returning s.item)
insert into taskq_demo_orders.moves (number, what, item) select $1::int, 'released', g.item from given g returning item;

-- name: ship
-- Take one from the shelf for an order; no row where the shelf is empty, whatever the books say.
with taken as (
  update taskq_demo_orders.stock s set shelf = s.shelf - 1 where s.item = $2::text and s.shelf > 0 returning s.item)
insert into taskq_demo_orders.moves (number, what, item) select $1::int, 'shipped', t.item from taken t returning item;

-- name: recall
-- Put back on the shelf what was taken from it for an order.
with given as (
  update taskq_demo_orders.stock s set shelf = s.shelf + 1 where s.item = $2::text returning s.item)
insert into taskq_demo_orders.moves (number, what, item) select $1::int, 'recalled', g.item from given g returning item;

-- name: moves
-- What was done for each order, how often.
select m.number, m.what, count(*)::int as n from taskq_demo_orders.moves m group by m.number, m.what;

-- name: stock
-- What is left of each item.
select s.item, s.books, s.shelf from taskq_demo_orders.stock s order by s.item;
