//! Users, roles and rights, as root sets them.

use crate::etcd::Etcd;
use crate::grpc::{Client, Status};
use crate::pb::{
    AuthenticateResponse, Empty, NameAndPassword, NameAndRole, Permission, RoleGrant, RoleRevoke,
    UserAndRole, prefix_end,
};

/// The user that rangecache is.
pub const MIRROR: &str = "mirror";

impl Client {
    async fn auth(&self, method: &str, request: &impl prost::Message) -> Result<(), Status> {
        let path = format!("/etcdserverpb.Auth/{method}");
        self.unary::<Empty>(&path, request).await.map(|_| ())
    }

    /// Adds a user.
    pub async fn add_user(&self, name: &str, password: &str) -> Result<(), Status> {
        let (name, password) = (name.to_owned(), password.to_owned());
        self.auth("UserAdd", &NameAndPassword { name, password }).await
    }

    /// Adds a role without rights.
    pub async fn add_role(&self, role: &str) -> Result<(), Status> {
        // Its name is the first field here too.
        let (name, password) = (role.to_owned(), String::new());
        self.auth("RoleAdd", &NameAndPassword { name, password }).await
    }

    /// Gives `user` a role.
    pub async fn give(&self, user: &str, role: &str) -> Result<(), Status> {
        let (user, role) = (user.to_owned(), role.to_owned());
        self.auth("UserGrantRole", &UserAndRole { user, role }).await
    }

    /// Takes a role from `user`.
    pub async fn take(&self, user: &str, role: &str) -> Result<(), Status> {
        let (name, role) = (user.to_owned(), role.to_owned());
        self.auth("UserRevokeRole", &NameAndRole { name, role }).await
    }

    /// Lets `role` read `[key, range_end)`.
    pub async fn allow(
        &self,
        role: &str,
        key: impl AsRef<[u8]>,
        range_end: impl AsRef<[u8]>,
    ) -> Result<(), Status> {
        let permission = Permission {
            kind: 0,
            key: key.as_ref().to_vec(),
            range_end: range_end.as_ref().to_vec(),
        };
        let grant = RoleGrant {
            role: role.to_owned(),
            permission: Some(permission),
        };
        self.auth("RoleGrantPermission", &grant).await
    }

    /// Takes that right from `role`.
    pub async fn forbid(
        &self,
        role: &str,
        key: impl AsRef<[u8]>,
        range_end: impl AsRef<[u8]>,
    ) -> Result<(), Status> {
        let revoke = RoleRevoke {
            role: role.to_owned(),
            key: key.as_ref().to_vec(),
            range_end: range_end.as_ref().to_vec(),
        };
        self.auth("RoleRevokePermission", &revoke).await
    }

    /// Switches authentication on; root must be there, with its role.
    pub async fn auth_enable(&self) -> Result<(), Status> {
        self.auth("AuthEnable", &Empty {}).await
    }
}

/// A token for one of [`people`].
pub async fn token(direct: &Client, name: &str) -> String {
    let answer: AuthenticateResponse = direct
        .unary(
            "/etcdserverpb.Auth/Authenticate",
            &NameAndPassword {
                name: name.into(),
                password: password(name),
            },
        )
        .await
        .unwrap();
    answer.token
}

/// Everybody's password.
pub fn password(name: &str) -> String {
    format!("open-sesame-{name}")
}

/// Users, roles and rights; switches auth on and returns root.
pub async fn people(etcd: &Etcd) -> Client {
    let nobody = etcd.client().await;
    for (name, role) in [(MIRROR, "all"), ("alice", "a"), ("bob", "b"), ("carol", "")] {
        nobody.add_user(name, &password(name)).await.unwrap();
        if !role.is_empty() {
            nobody.add_role(role).await.unwrap();
            nobody.give(name, role).await.unwrap();
        }
    }
    nobody.allow("all", "\0", "\0").await.unwrap();
    nobody.allow("a", "/a/", prefix_end(b"/a/")).await.unwrap();
    nobody.allow("b", "/b/", prefix_end(b"/b/")).await.unwrap();
    nobody.allow("b", "/a/007", "").await.unwrap();
    nobody.enable_auth(&password("root")).await.unwrap()
}
